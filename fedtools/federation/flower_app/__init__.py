"""A Flower App that carries a federation's files; `fedtools flower app` copies it out.

It runs in Flower's environment, in which there is no fedtools: it imports nothing of it, and calls
the program. See `server_app` for what the server does, `client_app` for a site, and `folder` for
what they send each other.
"""
