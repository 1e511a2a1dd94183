"""Finds free time between the bookings of a meeting room."""

from .schedule import busy_blocks, free_slots
from .times import format_time, parse_slot, parse_time

__all__ = ["busy_blocks", "format_time", "free_slots", "parse_slot", "parse_time"]
