"""Measurements of what the code bases behind the systems claimed: of a checkout, not of the installed package."""
