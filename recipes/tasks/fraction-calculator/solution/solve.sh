#!/bin/bash
set -euo pipefail
cat > /workspace/calc <<'PROGRAM'
#!/usr/bin/env python3
"""Shift the work to two steps: parse to a tree (grammar errors), then evaluate it (missing values)."""
import sys
from fractions import Fraction

sys.setrecursionlimit(20_000)
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2, "^": 4}
SIGN = 3


class GrammarError(Exception):
    def __init__(self, at):
        self.at = at


def tokens(text):
    out, at = [], 0
    while at < len(text):
        start = at
        if text[at] == " ":
            at += 1
        elif text[at] in "0123456789":
            while at < len(text) and text[at] in "0123456789":
                at += 1
            if at < len(text) and text[at] == ".":
                at += 1
                if at == len(text) or text[at] not in "0123456789":
                    out.append(("number", start))
                    out.append(("broken", at))
                    return out
                while at < len(text) and text[at] in "0123456789":
                    at += 1
            out.append((Fraction(text[start:at]), start))
        else:
            out.append((text[at], at))
            at += 1
    out.append(("end", len(text)))
    return out


def parse(text):
    stream = tokens(text)
    position = 0

    def peek():
        return stream[position]

    def advance():
        nonlocal position
        position += 1
        return stream[position - 1]

    def climb(limit):
        token, at = advance()
        if token == "-":
            left = ("sign", climb(SIGN))
        elif token == "(":
            left = climb(0)
            closing, at = advance()
            if closing != ")":
                raise GrammarError(at)
        elif isinstance(token, Fraction):
            left = token
        elif token == "number":
            raise GrammarError(peek()[1])
        else:
            raise GrammarError(at)
        while peek()[0] in BINDING and BINDING[peek()[0]] > limit:
            operator, _ = advance()
            # The right side of ^ may start with a sign and goes on to the right.
            right = climb(SIGN - 1 + 0.5 if operator == "^" else BINDING[operator])
            left = (operator, left, right)
        return left

    tree = climb(0)
    token, at = peek()
    if token != "end":
        raise GrammarError(at)
    return tree


def evaluate(tree):
    if isinstance(tree, Fraction):
        return tree
    if tree[0] == "sign":
        return -evaluate(tree[1])
    operator, a, b = tree[0], evaluate(tree[1]), evaluate(tree[2])
    if operator == "^":
        if b.denominator != 1 or abs(b) > 1000:
            raise ValueError("bad exponent")
        if a == 0 and b < 0:
            raise ValueError("division by zero")
        return a ** int(b)
    if operator in "/%" and b == 0:
        raise ValueError("division by zero")
    return {"+": a.__add__, "-": a.__sub__, "*": a.__mul__}[operator](b) if operator in "+-*" else (a / b if operator == "/" else a % b)


if len(sys.argv) != 2:
    print("usage: calc EXPRESSION")
    sys.exit(1)
try:
    print(evaluate(parse(sys.argv[1])))
except GrammarError as error:
    print(f"error at {error.at + 1}")
    sys.exit(2)
except ValueError as error:
    print(f"error: {error}")
    sys.exit(3)
PROGRAM
chmod +x /workspace/calc
