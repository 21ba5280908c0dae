"""Tables of any id: their ids are 64-bit integers that are not known beforehand (docs/any_ids.md)."""
