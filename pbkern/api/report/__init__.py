"""Explanation -> a report of one page of HTML, which needs no network and no library."""
