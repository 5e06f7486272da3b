"""A library as C sees it: names, types, codes, the header, the metadata, and files that go with them."""
