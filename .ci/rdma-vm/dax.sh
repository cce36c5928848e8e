# Kept memory on DAX devices, made from memory that the kernel's command line reserved (memmap=, see boot): conformance, restarts,
# and what is refused. Part of guest.sh.
cd /tmp
failed=0
for region in 0 1; do
  ndctl create-namespace -f -e namespace$region.0 -m devdax -M mem >/dev/null || exit 1
done
export FARWOOD_DAX=/dev/dax0.0,/dev/dax1.0

fail() { echo "FAILED: $*"; failed=1; }
quiet() { "$@" >said 2>&1 || { cat said; return 1; }; grep '^test result' said; }
quiet timeout 300 ./conformance --test-threads 1 shm:: || fail "conformance on mapped DAX devices"
quiet timeout 300 ./conformance --test-threads 1 tcp:: || fail "conformance over TCP on DAX devices"

# The start of the machine: the VM cannot be started again without losing the device.
boot=$(cat /proc/sys/kernel/random/boot_id)
serve() {
  rm -f served served-log
  FARWOOD_BOOT_ID=$boot ./farwood serve --shm /tmp/dax.sock --path /dev/dax0.0 --memory 32MiB "$@" >served 2>served-log &
  server=$!
  until grep -qs '^memory server' served; do
    kill -0 $server 2>/dev/null || { cat served-log; return 1; }
    sleep 0.1
  done
}
pool=shm:///tmp/dax.sock
has() {
  found=$(./farwood get $pool store "$1" 2>&1)
  [ "$found" = "$2" ] || fail "$1 is not $2, $3: $found"
}

# What the suite left has another shape, which is told.
serve && fail "the memory of another pool was taken"
grep -q "of another server's memory" served-log || fail "$(cat served-log)"
FARWOOD_TEST_PART="wipe /dev/dax0.0" ./conformance --exact play --ignored >/dev/null || fail "a device cannot be emptied"
serve || fail "a server on an empty device"
./farwood create $pool store --engine sphinx >/dev/null || fail "an index on a device"
for n in 1 2 3 4 5 6 7 8; do ./farwood put $pool store key$n value$n || fail "put"; done
kill $server; wait $server || fail "a clean end"

boot=11111111111111111111111111111111; serve || fail "after a clean end and another boot"
has key5 value5 "after a clean end and another boot"
./farwood put $pool store key5 changed || fail "put"
kill -9 $server; wait $server 2>/dev/null

boot=11111111111111111111111111111111; serve || fail "after kill -9"
has key5 changed "after kill -9"
has key8 value8 "after kill -9"
kill -9 $server; wait $server 2>/dev/null

boot=22222222222222222222222222222222; serve && fail "in use under another boot, and taken"
grep -q 'not whole: it was in use.*--accept-torn' served-log || fail "$(cat served-log)"
boot=22222222222222222222222222222222; serve --accept-torn || fail "--accept-torn"
./farwood status $pool | grep -q '^  torn' || fail "it does not say that it is torn"
has key5 changed "after --accept-torn"
kill $server; wait $server || fail "a clean end"
serve || fail "closed, and not taken"
has key8 value8 "at the end"
kill $server; wait $server || fail "a clean end"
[ $failed = 0 ] && echo "kept memory on /dev/dax0.0: clean ends, kill -9, another boot, --accept-torn"
exit $failed
