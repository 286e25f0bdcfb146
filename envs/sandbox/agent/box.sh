# The agent for sandboxes without Python: one command at a time, lines in, lines and bytes out.
#
#     to us    RUN word seconds limit script-in-base64
#     from us  END word exit-code timed-out bytes-of-stdout bytes-of-stderr, then these bytes
#
# One more byte than the limit is sent of a stream that was longer. Needs what busybox has.
d=/tmp/.flash-agent
mkdir -m 700 "$d" && mkfifo "$d/o" "$d/e" || exit 1
printf '%s shell %s\n' "$1" "$(id -u)"

keep() {
  head -c "$2" >"$d/$1.kept"
  cat >/dev/null
}

while read -r verb word seconds limit script; do
  [ "$verb" = RUN ] || exit 1
  rm -f "$d/timed"
  if ! printf %s "$script" | base64 -d >"$d/script"; then
    printf 'END %s 125 0 0 0\n' "$word"
    continue
  fi
  keep o $((limit + 1)) <"$d/o" & out=$!
  keep e $((limit + 1)) <"$d/e" & err=$!
  setsid /bin/sh "$d/script" </dev/null >"$d/o" 2>"$d/e" & run=$!
  setsid /bin/sh -c 'sleep "$1"; : >"$2"; kill -TERM -"$3"; sleep 0.5 || sleep 1; kill -KILL -"$3"' \
    watch "$seconds" "$d/timed" "$run" </dev/null >/dev/null 2>&1 & watch=$!
  wait "$run"
  code=$?
  if [ -e "$d/timed" ]; then wait "$watch"; timed=1; else timed=0; fi
  # Itself too: it may not have made its group yet, and would then be waited for.
  kill -KILL -"$watch" "$watch" -"$run" 2>/dev/null
  # Something that left the process group may hold the pipes for ever.
  setsid /bin/sh -c 'sleep 1; kill -KILL "$1" "$2"' guard "$out" "$err" </dev/null >/dev/null 2>&1 & guard=$!
  wait "$out"
  wait "$err"
  kill -KILL -"$guard" 2>/dev/null
  wait "$watch" "$guard" 2>/dev/null
  printf 'END %s %s %s %s %s\n' "$word" "$code" "$timed" "$(wc -c <"$d/o.kept")" "$(wc -c <"$d/e.kept")"
  cat "$d/o.kept" "$d/e.kept"
done
