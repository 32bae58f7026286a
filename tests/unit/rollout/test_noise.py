from __future__ import annotations

from miles.rollout.noise import EVAL_STREAM, noise_key


def test_every_place_in_a_run_has_its_own_64_bit_key() -> None:
    places = [
        (seed, rollout, group, index)
        for seed in (0, 1)
        for rollout in range(3)
        for group in range(20)
        for index in range(8)
    ]
    keys = {noise_key(*place, stream=stream) for place in places for stream in ("rollout", EVAL_STREAM)}
    assert len(keys) == 2 * len(places)
    assert all(0 <= key < 2**64 for key in keys)
    assert min(keys) < 2**60 and max(keys) > 2**63


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    # blake2b of the packed numbers and the stream name, worked out with another tool:
    # printf '\x2a\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0rollout' | b2sum -l 64
    assert noise_key(42, 1, 2, 3) == int.from_bytes(bytes.fromhex("037db24043cd9df3"), "little")
