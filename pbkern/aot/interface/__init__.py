"""What C sees of a library: names, types, codes, the header, the metadata, and files that go with them."""
