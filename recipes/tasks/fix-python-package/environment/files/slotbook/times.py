"""Times of day as minutes since midnight."""

import re

_TIME = re.compile(r"\s*(\d{1,2}):(\d{2})\s*(am|pm)\s*", re.IGNORECASE)


def parse_time(text):
    """Minutes since midnight of a 12-hour time such as "9:30am" (570) or "4:05 PM" (965).

    The day starts at 12:00am (0); noon is 12:00pm (720). ValueError for anything else.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time: {text!r}")
    hour, minute = int(match[1]), int(match[2])
    if not 1 <= hour <= 12 or minute > 59:
        raise ValueError(f"not a time: {text!r}")
    if match[3].lower() == "pm" and hour != 12:
        hour += 12
    return hour * 60 + minute


def format_time(minutes):
    """The reverse of parse_time: 570 becomes "9:30am"."""
    if not 0 <= minutes < 24 * 60:
        raise ValueError(f"not a time of day: {minutes}")
    hour, minute = divmod(minutes, 60)
    return f"{hour % 12 or 12}:{minute:02d}{'am' if hour < 12 else 'pm'}"


def parse_slot(text):
    """(start, end) in minutes of a slot such as "9:00am-10:30am". The end lies after the start."""
    start_text, separator, end_text = text.partition("-")
    if not separator:
        raise ValueError(f"not a slot: {text!r}")
    start, end = parse_time(start_text), parse_time(end_text)
    if end <= start:
        raise ValueError(f"slot ends before it starts: {text!r}")
    return start, end
