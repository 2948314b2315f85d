"""Stores below host memory. Each line may import only what stands below it; a test holds this drawing.

lower                           between host memory and all stores: writes down, fetches up
room                            what waiting requests fetch, and how much of host memory they may hold

store                           makes a medium asynchronous: threads, deadlines, cancellation
counters | breaker | speed      what it did; when it stops trying; what a load takes
transfer                        a unit of its work, and the queue of them

disk | remote | files           media: slabs of slots, Redis, a file for each block as the shortest example
tenant_names | slabs            beside the slots, whose they are; how slabs lie on disk
header                          what each stored block carries, and its proof
base                            the contract of a medium, and why blocks are misses

host                            the memory that all of them fill and read; two processes can share it
"""
