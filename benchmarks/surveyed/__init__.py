"""Cases of `python -m benchmarks.survey`: in each module CASES, name -> (function, arguments as text ...)."""
