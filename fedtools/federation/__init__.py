"""Federated experiments from initialisation to evaluation, as the commands run them."""
