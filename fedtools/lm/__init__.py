"""Tokens and n-gram language models."""
