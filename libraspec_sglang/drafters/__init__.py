"""Drafters behind one small protocol (base.py)."""
