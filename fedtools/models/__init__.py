"""Networks, built from configurations; they know no federation."""
