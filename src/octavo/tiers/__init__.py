"""Stores below host memory. Each line may import only what stands below it; a test enforces this drawing.

lower                    between host memory and all stores: writes down, fetches up for requests that wait
neighbours               a medium: other servers, each asked like a Redis that can only be read
store                    makes a medium asynchronous: threads, deadlines, cancellation; stops trying one that fails
disk | lending           a medium: slots of preallocated files; and what answers other servers
remote                   a medium: Redis
slabs                    the files in the directory of a disk
header                   what each stored block carries, and its proof
base                     the contract of a medium, why blocks are misses, transfers and their totals
speed                    how long loads take, as measured
"""
