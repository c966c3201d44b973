"""Fused operators."""
