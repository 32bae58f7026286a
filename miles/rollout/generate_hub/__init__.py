"""Ways to write the answer to a prompt, one file each."""
