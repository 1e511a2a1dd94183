import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

from slotbook import busy_blocks, format_time, free_slots, parse_time


class Times(unittest.TestCase):
    def test_parse(self):
        self.assertEqual(parse_time("9:30am"), 570)
        self.assertEqual(parse_time("4:05 PM"), 965)
        self.assertEqual(parse_time("12:00pm"), 720)

    def test_format(self):
        self.assertEqual(format_time(570), "9:30am")
        self.assertEqual(format_time(0), "12:00am")

    def test_rejects(self):
        for text in ("", "9am", "13:00pm", "9:60am", "0:30am"):
            with self.assertRaises(ValueError):
                parse_time(text)


class Schedule(unittest.TestCase):
    def test_overlap(self):
        self.assertEqual(busy_blocks(["10:00am-11:00am", "9:00am-10:30am"]), [(540, 660)])

    def test_free(self):
        self.assertEqual(
            free_slots(["9:00am-10:30am", "10:00am-11:00am"], closes="12:00pm"),
            ["8:00am-9:00am", "11:00am-12:00pm"],
        )

    def test_night_watch(self):
        # A long booking from midnight on, with a short one inside it.
        self.assertEqual(
            free_slots(["12:15am-7:45am", "1:00am-2:00am"], opens="12:00am", closes="8:00am"),
            ["12:00am-12:15am", "7:45am-8:00am"],
        )


if __name__ == "__main__":
    unittest.main()
