"""Error rates as sclite counts them, verification, intervals, and tests between systems.

It takes texts, or scores and labels, and knows no model. Pages are in `report`.
"""
