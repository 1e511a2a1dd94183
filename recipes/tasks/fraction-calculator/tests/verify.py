"""Runs calc on fixed and random expressions. Without plain arithmetic, nothing else counts."""

import random
import re
import sys
from fractions import Fraction

sys.path.insert(0, "/tests")
from harness import finish, run, take_over

sys.setrecursionlimit(10_000)
DIGITS = re.compile("[0-9]+")


class Broken(Exception):
    pass


class NoValue(Exception):
    pass


class Reference:
    """Recursive descent. Evaluates to thunks, so that a broken grammar is seen before a missing value."""

    def __init__(self, text):
        self.text = text
        self.at = 0

    def answer(self):
        try:
            value = self.sum()
            self.skip()
            if self.at < len(self.text):
                raise Broken
        except Broken:
            return 2, f"error at {self.at + 1}\n"
        try:
            return 0, f"{value()}\n"
        except NoValue as error:
            return 3, f"error: {error}\n"

    def skip(self):
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def take(self, characters):
        self.skip()
        if self.at < len(self.text) and self.text[self.at] in characters:
            self.at += 1
            return self.text[self.at - 1]
        return None

    def chain(self, part, operators):
        left = part()
        while operator := self.take(operators):
            left = binary(operator, left, part())
        return left

    def sum(self):
        return self.chain(self.product, "+-")

    def product(self):
        return self.chain(self.sign, "*/%")

    def sign(self):
        if self.take("-"):
            inner = self.sign()
            return lambda: -inner()
        return self.power()

    def power(self):
        base = self.atom()
        if self.take("^"):
            return binary("^", base, self.sign())
        return base

    def atom(self):
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise Broken
            return value
        match = DIGITS.match(self.text, self.at)
        if match is None:
            raise Broken
        self.at = match.end()
        if self.at < len(self.text) and self.text[self.at] == ".":
            decimals = DIGITS.match(self.text, self.at + 1)
            if decimals is None:
                self.at += 1
                raise Broken
            self.at = decimals.end()
        value = Fraction(self.text[match.start() : self.at])
        return lambda: value


def binary(operator, left, right):
    def value():
        a, b = left(), right()
        if operator == "+":
            return a + b
        if operator == "-":
            return a - b
        if operator == "*":
            return a * b
        if operator == "^":
            if b.denominator != 1 or abs(b) > 1000:
                raise NoValue("bad exponent")
            if a == 0 and b < 0:
                raise NoValue("division by zero")
            return a ** int(b)
        if b == 0:
            raise NoValue("division by zero")
        return a / b if operator == "/" else a % b

    return value


FIXED = {
    "basic": ["42", "1+2", "8-3-2", "2 * (3 + 4) - 5", "100/10/5", "1/3 + 1/6", "6/4", "((5))"],
    "decimals": ["0.1+0.2", "1.50", "0.125*8", "10.01-0.01", "007"],
    "signs": ["---2", "3--2", "2*-3", "-(1-4)", "1/-2", "- 5", "7/-2*-1"],
    "powers": ["2^3^2", "-2^2", "(-2)^2", "2^--2", "2^-1^2", "0^0", "2*3^2", "2^200"],
    "modulo": ["-7%3", "7%-3", "(-7/2)%(2/3)", "10%4*2"],
    "grammar": ["", "(", "()", "1 + 2)", "1 2", ".5", "1.2.3", "+1", "2**3", "1e3", "1 + ", "1\t+2", "1 . 2", "2(3)", "½", "1/0)"],
    "values": ["1/(2-2)", "5%0", "0^-1", "2^0.5", "2^1001", "0^(-1/2)", "1/0+2^0.5", "2^0.5+1/0", "(1/0)^0.5", "2^1000-2^1000"],
}


def expression(rng, depth):
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([str(rng.randint(0, 30)), f"{rng.randint(0, 9)}.{rng.randint(0, 99):02d}"])
    pad = " " * rng.choice([0, 0, 1, 2])
    shape = rng.random()
    if shape < 0.15:
        return f"-{pad}{expression(rng, depth - 1)}"
    if shape < 0.35:
        return f"({pad}{expression(rng, depth - 1)})"
    if shape < 0.45:
        return f"({expression(rng, depth - 1)}){pad}^{pad}{rng.choice(['2', '3', '-1', '-2', '0', '1.5'])}"
    return f"{expression(rng, depth - 1)}{pad}{rng.choice('++--**//%')}{pad}{expression(rng, depth - 1)}"


def spoiled(rng, text):
    """The expression with one character lost, doubled or put in."""
    at = rng.randrange(len(text) + 1)
    return rng.choice([text[:at] + text[at + 1 :], text[:at] + text[at - 1 : at] + text[at:], text[:at] + rng.choice("+*()^.%x ") + text[at:]])


class Program:
    """The calculator under test. One that hangs three times is not asked again: time is limited."""

    def __init__(self):
        self.hung = 0

    def call(self, *arguments):
        if self.hung == 3:
            return None
        code, out = run(["/workspace/calc", *arguments], timeout=5)
        self.hung += code is None
        return code, out

    def passes(self, text):
        return self.call(text) == Reference(text).answer()


def main():
    rng = random.Random()
    take_over()
    calc = Program()
    groups = dict(FIXED)
    groups["nesting"] = ["(" * 200 + "1/2" + ")" * 200, "(" * 200 + "1", "-" * 150 + "3"]
    groups["random"] = [expression(rng, 4) for _ in range(12)]
    groups["spoiled"] = [spoiled(rng, expression(rng, 3)) for _ in range(10)]
    scores = {}
    for name, texts in groups.items():
        scores[name] = sum(calc.passes(text) for text in texts) / len(texts)
        if name == "basic" and scores[name] == 0:
            break
    usage = (1, "usage: calc EXPRESSION\n")
    scores["usage"] = ((calc.call() == usage) + (calc.call("1", "2") == usage)) / 2
    reward = sum(scores.values()) / (len(groups) + 1) if scores["basic"] == 1 else 0
    finish(reward=reward, **scores)


if __name__ == "__main__":
    main()
