"""Attacks on what the clients of a federation send, one room for each thing that is attacked.

Here is what they share: victims, defences, what an attacker knows, options, the utility that a
defence costs. Scores of speaker verification are in `score`, backends such as PLDA in `speaker`,
and the card that sums attacks up in `report`.
"""
