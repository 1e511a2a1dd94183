"""Busy and free time of a day."""

from .times import format_time, parse_slot, parse_time


def busy_blocks(bookings):
    """Bookings in any order, merged into (start, end) blocks that neither overlap nor touch."""
    blocks = []
    for start, end in sorted(parse_slot(booking) for booking in bookings):
        if blocks and start <= blocks[-1][1]:
            blocks[-1] = (blocks[-1][0], end)
        else:
            blocks.append((start, end))
    return blocks


def free_slots(bookings, opens="8:00am", closes="6:00pm", minimum=15):
    """Free slots between opening and closing time that last at least `minimum` minutes, in order.

    Bookings may overlap, lie inside each other, and reach beyond opening hours.
    """
    cursor, closing = parse_time(opens), parse_time(closes)
    slots = []
    for start, end in busy_blocks(bookings):
        if min(start, closing) - cursor >= minimum:
            slots.append((cursor, min(start, closing)))
        cursor = max(cursor, end)
    if closing - cursor >= minimum:
        slots.append((cursor, closing))
    return [f"{format_time(start)}-{format_time(end)}" for start, end in slots]
