"""Attacks on the features that clients sent, by DecoupleFL: who speaks, and what was said or heard.

Measures with their intervals are in `figures`; all attacks of one run are in `attack`.
"""
