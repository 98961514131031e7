"""Reports of measurements for readers: tables, RESULTS.md and its plots."""
