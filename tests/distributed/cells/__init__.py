"""Layouts, the ranks that they run on, and what is compared; test files of several ranks are written with these.

layouts, cover, matrix, experts    the layouts that are tried, and those that are refused
run                                ranks that are started, given functions to run, limited in time and always ended
commands                           commands that start ranks, as a user types them
compare                            a layout compared with one process, and the bounds for that
steps                              runs of any layout that a test takes step by step
bugs                               bugs that the comparison must find
memory, offload, checkpoints, reshard, reshard_pairs, offload_disks: what ranks do in the tests of that name
launch_rank, fed_rank, two_machines, wrong_plugin, preloaded: programs and plugins, which have files of their own
"""
