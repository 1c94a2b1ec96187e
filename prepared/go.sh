#!/bin/sh
# All prepared kernels on one GPU: compiled by fourteen processes, then equality and times, in 240 s.
# In three calls: --parts resident small pair gae tree; --parts many robot; --parts early whole. --dry: on a CPU, tiny.
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=.
run="${PYTHON:-python} -W ignore prepared/go.py"
case " $* " in
*" --dry "*) TRITON_INTERPRET=1 $run "$@"; exit $? ;;
esac
began=$(date +%s)
for each in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do
    OMP_NUM_THREADS=1 timeout 100 $run "$@" --warm $each 14 >/dev/null 2>&1 &
done
wait
used=$(($(date +%s) - began))
echo "compiled in $used s"
timeout $((240 - used)) $run "$@" --limit $((225 - used))
