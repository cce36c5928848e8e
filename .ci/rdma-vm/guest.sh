# What is tested inside the virtual machine: see run. Engines add their suites here.
cd /tmp
cp /mnt/share/farwood /mnt/share/conformance /mnt/share/processes .
export FARWOOD_VERBS=rxe0,10.9.0.1 FARWOOD_BINARY=/tmp/farwood
failed=0
step() {
  echo "== $* (after $(cut -d. -f1 /proc/uptime) s)"
  "$@" || { echo "FAILED: $*"; failed=1; }
}
quiet() { "$@" >said 2>&1 || { cat said; return 1; }; grep '^test result' said; }

step ./farwood devices
step quiet timeout 300 ./conformance --test-threads 1 --skip shm:: --skip tcp:: verbs
step quiet timeout 200 ./processes --test-threads 1 --skip linearizable verbs::
# Two client processes on trees that two servers hold.
step quiet timeout 300 ./processes --test-threads 1 linearizable

./farwood serve --listen 127.0.0.1:7000 --verbs rxe0 --memory 128MiB >served 2>&1 &
server=$!
while ! grep -q '^memory server' served; do sleep 0.1; done

# Real torn reads, none of which the checksummed reader accepts.
litmus() {
  ./farwood litmus --transport verbs://127.0.0.1:7000 --sizes 1KiB,4KiB --seconds 0.4 >said || { cat said; return 1; }
  cat said
  grep '^checksummed' said | awk '/torn reads seen/ {split($0, part, "torn reads seen "); torn += part[2]} END {exit torn == 0}'
}
step litmus

# Our latency beside perftest's, in turns: the least p50 of three each. ib_write_lat gives half of a round trip.
typical() {
  "$@" >/dev/null 2>&1 &
  sleep 0.7
  "$@" 10.9.0.1 2>/dev/null | awk '/^ *[0-9]+ +[0-9]+ / {print $5}'
  wait $!
}
least() { sort -g | head -1; }
probe() {
  for round in 1 2 3; do
    typical ib_read_lat -d rxe0 -x 1 -n 2000 -s 8 >>perf-READ
    typical ib_write_lat -d rxe0 -x 1 -n 2000 -s 8 | awk '{print 2 * $1}' >>perf-WRITE
    typical ib_atomic_lat -d rxe0 -x 1 -n 2000 >>perf-FAA
    ./farwood probe --transport verbs://127.0.0.1:7000 --sizes 8 --depths 1 --verbs read,write,faa --seconds 0.3 \
      --working-set 4KiB >said || return 1
    for verb in READ WRITE FAA; do
      awk -v verb=$verb '$1 == verb {for (n = 2; n < NF; n++) if ($(n + 1) == "us" || $(n + 1) == "ms") {
        print $n * ($(n + 1) == "ms" ? 1000 : 1); exit}}' said >>"ours-$verb"
    done
  done
  for verb in READ WRITE FAA; do
    ours=$(least <"ours-$verb") theirs=$(least <"perf-$verb")
    echo "$verb of 8 bytes: p50 $ours us, perftest $theirs us: $(echo "$ours $theirs" | awk '{printf "%.2f", $1 / $2}')"
  done
}
step probe

kill $server
wait $server

step sh /mnt/share/dax.sh
exit $failed
