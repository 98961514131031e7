"""What was measured, as people read it: tables, RESULTS.md and its plot."""
