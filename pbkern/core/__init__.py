"""Tools of every stage: jaxprs, affine expressions, rules, machine, options, errors.

Imports no other stage.
"""
