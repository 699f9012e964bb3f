"""Regions, copies, plans and the executor that runs them."""
