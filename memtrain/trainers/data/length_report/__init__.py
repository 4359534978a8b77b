"""The length report of `memtrain inspect-lengths`."""
