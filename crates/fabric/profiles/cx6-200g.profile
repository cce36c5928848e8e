# ConnectX-6, 200 Gbit/s: the NICs of Sphinx's machines (one dual-port 2 x 100 Gbit/s ConnectX-6 each).
# Not calibrated against any measurement: where nothing is known, the number of cx5-100g stands, and says so.

name                  = cx6-200g  # 200 Gbit/s ConnectX-6 NICs, PCIe 4.0 x16, one switch (Sphinx, test bed)

link.round_trip_ns    = 1900      # as cx5-100g; Sphinx's introduction speaks of 2 us for this class of NICs
link.bytes_per_ns     = 25        # 200 Gbit/s each way (Sphinx, introduction and test bed)
link.header_bytes     = 30        # as cx5-100g: the wire format is the same

nic.message_ns        = 4.65      # 215 M messages/s (NVIDIA, ConnectX-6 adapter user manual, introduction): an upper bound
nic.units             = 16        # as cx5-100g: not known
nic.verb_ns           = 20        # as cx5-100g: not known
nic.pcie_ns           = 12        # as cx5-100g: PCIe 4.0 doubles the bytes, not the transactions

atomic.word_ns        = 400       # as cx5-100g: not known
atomic.bucket_bits    = 12        # as cx5-100g: not known
atomic.on_chip_ns     = 125       # as cx5-100g: not known

compute.operation_ns  = 2400      # as cx5-100g
compute.spread        = 0.2       # as cx5-100g
compute.bytes_per_ns  = 8         # as cx5-100g
compute.post_ns       = 0         # as cx5-100g
compute.poll_ns       = 0         # as cx5-100g

server.call_ns        = 500       # as cx5-100g
server.access_ns      = 90        # as cx5-100g
server.bytes_per_ns   = 8         # as cx5-100g
server.slice_ns       = 5000      # as cx5-100g
