"""The command `memtrain plan`: making, solving, showing and keeping a plan."""
