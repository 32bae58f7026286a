"""HTTP between programs and engines."""
