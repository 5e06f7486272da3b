"""The version, where every layer finds it."""

VERSION = "0.1.0"
