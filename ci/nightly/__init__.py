"""The nightly job: plan, check, run every stage, and tell what was not verified."""
