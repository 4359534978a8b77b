"""What `memtrain inspect-lengths` counts: lengths of rows, what each max_length loses and costs. No torch."""
