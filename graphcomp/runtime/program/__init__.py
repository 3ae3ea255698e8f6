"""Rank programs: lowered from a schedule, linked, executed, and what they send."""
