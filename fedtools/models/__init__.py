"""Networks built from configurations, without any knowledge of the federation."""
