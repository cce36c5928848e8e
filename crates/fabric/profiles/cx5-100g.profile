# ConnectX-5, 100 Gbit/s: the machines of Sherman (SIGMOD '22, section 5.1), also of DEX and Dolphin.
# One number a line, with its source. "Sherman" is that paper. "Prototype" is a throw-away model that was fitted to
# FG+ in its Table 1 as a whole. With the engine FG+ the fit was repeated here, by atomic.word_ns alone; since then these numbers are
# frozen, and everything else is prediction. atomic.on_chip_ns, which FG+ does not use, follows from others (docs/cost-model.md).

name                  = cx5-100g  # 100 Gbit/s ConnectX-5 NICs, PCIe 3.0 x16, one switch (Sherman 5.1)

link.round_trip_ns    = 1900      # prototype; Sherman 2.2 and 3.1.2 say "at most 2 us"
link.bytes_per_ns     = 12.5      # 100 Gbit/s each way (Sherman 5.1)
link.header_bytes     = 30        # InfiniBand: local route 8, base transport 12, checksums 6, rounded up for extended headers

nic.message_ns        = 9         # 111 M/s: with 12 no NIC could take in the ~110 M on-chip CAS/s of Sherman 4.3; Figure 3 wants > 50 M WRITEs/s
nic.units             = 16        # prototype: few units are what makes a hot word block the NIC
nic.verb_ns           = 20        # prototype, together with nic.units
nic.pcie_ns           = 12        # the prototype's price of a message (83 M/s), moved to verbs that cross PCIe: our reading, not measured

atomic.word_ns        = 400       # fitted to FG+, write-intensive, skewed (Sherman, Table 1); two PCIe transactions a word (Sherman 3.2.2), 2.5 M/s on one word
atomic.bucket_bits    = 12        # words with the same low 12 address bits exclude each other (Sherman 3.2.2)
atomic.on_chip_ns     = 125       # 16 units held for 20 + 125 ns each are the ~110 M CAS/s on the NIC's own memory of Sherman 4.3

compute.operation_ns  = 2400      # prototype: a client operation, beside its verbs
compute.spread        = 0.2       # prototype: +-20%, uniform; it found this too little
compute.bytes_per_ns  = 8         # assumed: copying or checking bytes that are in the cache, one 2.2 GHz core
compute.post_ns       = 0         # taken to be contained in compute.operation_ns
compute.poll_ns       = 0         # taken to be contained in compute.operation_ns

server.call_ns        = 500       # assumed: receive, dispatch, run and answer a short call on one wimpy core (Sherman 2.1 gives it 1 or 2)
server.access_ns      = 90        # assumed: one cache miss to local DRAM, for each access of a procedure
server.bytes_per_ns   = 8         # assumed: a core's own copy from DRAM
server.slice_ns       = 5000      # assumed: longest time that a procedure keeps a core while another waits
