#!/bin/bash
# A 0 comes first: in an image of its own the agent can take away what the rest needs.
echo 0 > /logs/verifier/reward.txt
# -I -S: nothing that the agent left in this system is loaded into the verifier.
exec python3 -I -S /tests/verify.py
