"""Older public import paths of `common_filters.py`."""

from miles.rollout.filter_hub.common_filters import FilterOutput as DynamicFilterOutput
from miles.rollout.filter_hub.common_filters import apply_reward_nonzero_std_filter as check_reward_nonzero_std
from miles.rollout.filter_hub.common_filters import check_no_aborted

__all__ = ["DynamicFilterOutput", "check_no_aborted", "check_reward_nonzero_std"]
