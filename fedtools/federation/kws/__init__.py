"""Scores of single clips, and what is detected in running speech."""
