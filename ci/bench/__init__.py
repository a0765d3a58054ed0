"""What people and other tools read, made from a benchmark's ``bench.jsonl``."""
