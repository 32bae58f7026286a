"""Reads run folders and logs, and shows what they say: report, comparison, diagnosis, live page. Never torch."""
