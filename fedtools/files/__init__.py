"""Everything on disk: formats, atomic writes, and the errors users see. Knows no torch module."""
