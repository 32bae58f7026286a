"""What a run takes of memory, disk and time, worked out from shapes before anything is loaded. Never imports torch."""
