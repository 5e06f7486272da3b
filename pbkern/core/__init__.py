"""What every stage may use: jaxprs, affine expressions, rules, machine, options, errors. Imports no other stage."""
