"""Checks slotbook on hidden calendars against a reference that works minute by minute.

Each defect counts half, and only while what worked before still works.
"""

import json
import random
import sys

sys.path.insert(0, "/tests")
from harness import finish, run, take_over

# Reads [function, arguments] pairs, writes one result each. Runs in a process of its own.
DRIVER = """
import json, sys
sys.path.insert(0, "/workspace")
import slotbook
results = []
for name, arguments in json.load(sys.stdin):
    try:
        results.append(getattr(slotbook, name)(*arguments))
    except ValueError:
        results.append("ValueError")
    except Exception as error:
        results.append(repr(error))
json.dump(results, sys.stdout)
"""


def clock(minutes):
    hour, minute = divmod(minutes, 60)
    return f"{hour % 12 or 12}:{minute:02d}{'am' if hour < 12 else 'pm'}"


def blocks(bookings):
    # Touching bookings merge: minute `start` to `end`, both edges taken, on a grid of half minutes.
    taken = set()
    for start, end in bookings:
        taken.update(range(2 * start, 2 * end + 1))
    out = []
    for point in sorted(taken):
        if out and out[-1][1] == point - 1:
            out[-1][1] = point
        else:
            out.append([point, point])
    return [[start // 2, end // 2] for start, end in out]


def free(bookings, opens, closes, minimum):
    busy = set()
    for start, end in bookings:
        busy.update(range(start, end))
    out = []
    for minute in range(opens, closes):
        if minute in busy:
            continue
        if out and out[-1][1] == minute:
            out[-1][1] = minute + 1
        else:
            out.append([minute, minute + 1])
    return [f"{clock(a)}-{clock(b)}" for a, b in out if b - a >= minimum]


def calendar(rng, earliest, nested):
    """Bookings; `nested` decides whether some end inside an earlier, longer one."""
    while True:
        bookings = []
        for _ in range(rng.randint(1, 6)):
            start = rng.randint(earliest, 23 * 60)
            bookings.append((start, min(start + rng.randint(5, 240), 24 * 60 - 1)))
        ordered = sorted(bookings)
        reach, found = -1, False
        for start, end in ordered:
            found = found or (start <= reach and end < reach)
            reach = max(reach, end)
        if found == nested:
            rng.shuffle(bookings)
            return bookings


def schedule_cases(rng, count, earliest, nested):
    cases = []
    for _ in range(count):
        bookings = calendar(rng, earliest, nested)
        texts = [f"{clock(a)}-{clock(b)}" for a, b in bookings]
        cases.append((["busy_blocks", [texts]], blocks(bookings)))
        opens = rng.randint(earliest, 12 * 60)
        closes = rng.randint(opens + 60, 23 * 60)
        minimum = rng.choice([1, 15, 30, 60])
        arguments = [texts, clock(opens), clock(closes), minimum]
        cases.append((["free_slots", arguments], free(bookings, opens, closes, minimum)))
    return cases


def passes(cases):
    code, out = run(
        ["python3", "-I", "-c", DRIVER], stdin=json.dumps([call for call, _ in cases]), timeout=20
    )
    try:
        results = json.loads(out)
    except (ValueError, RecursionError):
        return False
    return code == 0 and results == [expected for _, expected in cases]


rng = random.Random()
take_over()

invalid = ["", "9am", "13:00pm", "9:60am", "0:30am", "00:10pm", "9:30", "x9:30am", "9:30amx"]
kept = [(["parse_time", [clock(m)]], m) for m in range(60, 1440)]
kept += [(["parse_time", [f" {clock(m).upper()} "]], m) for m in range(60, 1440, 7)]
kept += [(["format_time", [m]], clock(m)) for m in range(1440)]
kept += [(["format_time", [m]], "ValueError") for m in (-1, 1440)]
kept += [(["parse_time", [text]], "ValueError") for text in invalid]
kept += [(["parse_slot", ["9:00am-9:00am"]], "ValueError"), (["parse_slot", ["9:00am"]], "ValueError")]
kept += schedule_cases(rng, 60, earliest=60, nested=False)

midnight = [(["parse_time", [clock(m)]], m) for m in range(60)]
midnight += [(["parse_slot", [f"{clock(m)}-1:30am"]], [m, 90]) for m in range(0, 60, 5)]
midnight += schedule_cases(rng, 20, earliest=0, nested=False)

nested = schedule_cases(rng, 60, earliest=60, nested=True)

scores = {"kept": passes(kept), "midnight": passes(midnight), "nested": passes(nested)}
reward = (scores["midnight"] + scores["nested"]) / 2 if scores["kept"] else 0
finish(reward=reward, **{name: int(passed) for name, passed in scores.items()})
