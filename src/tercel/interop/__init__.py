"""Heads in other people's formats: read, written, and proved against how each engine loads them."""
