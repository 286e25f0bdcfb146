# The agent for sandboxes without Python: one command at a time, lines in, lines and bytes out.
#
#     to us    RUN word seconds limit bytes-of-script script-in-base64
#     from us  END word exit-code timed-out bytes-of-stdout bytes-of-stderr, then these bytes
#              FULL word, when there was no room for the script or its output
#
# One more byte than the limit is sent of a stream that was longer. Needs what busybox has. What an earlier command has
# left behind is killed before the next one begins: it could answer in its place.
d=/tmp/.flash-agent
rm -rf /tmp/.flash-shell
mkdir -m 700 "$d" || exit 1
printf '%s shell %s\n' "$1" "$(id -u)"

clear() {
  # As process 1 we are spared ourselves. A process has ended when its last thread has, whatever the first one's state.
  [ $$ = 1 ] || return 0
  looks=0
  while [ "$looks" -lt 500 ]; do
    kill -KILL -1 2>/dev/null
    left=
    for process in /proc/[0-9]*; do
      [ "$process" != /proc/1 ] && { read -r stat <"$process/stat"; } 2>/dev/null || continue
      set -- ${stat##*)}
      case $1 in Z | X) [ "${18}" = 1 ] && continue ;; esac
      left=1
    done
    [ "$left" ] || return 0
    looks=$((looks + 1))
  done
  return 1
}

keep() {
  # Not by its exit code: that of busybox is 0 where there is no room.
  said=$(head -c "$2" 2>&1 >"$d/$1.kept") || said=failed
  cat >/dev/null
  [ -z "$said" ]
}

while read -r verb word seconds limit size script; do
  [ "$verb" = RUN ] || exit 1
  clear || exit 1
  # Pipes of its own: those of a command that has killed its readers hold what nobody has read until these are gone.
  rm -rf "$d/timed" "$d/o" "$d/e" "$d/o.kept" "$d/e.kept" "$d/script"
  mkfifo "$d/o" "$d/e" 2>/dev/null
  # There also where a command kills whoever would make them.
  touch "$d/o.kept" "$d/e.kept" 2>/dev/null
  printf %s "$script" | base64 -d >"$d/script" 2>/dev/null
  if [ ! -p "$d/o" ] || [ ! -p "$d/e" ] || [ ! -f "$d/o.kept" ] || [ ! -f "$d/e.kept" ] ||
    [ "$(wc -c <"$d/script")" -ne "$size" ]; then
    printf 'FULL %s\n' "$word"
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
  lost=0
  for kept in "$out" "$err"; do
    wait "$kept"
    if [ $? = 1 ]; then lost=1; fi
  done
  kill -KILL -"$guard" "$guard" 2>/dev/null
  wait "$watch" "$guard" 2>/dev/null
  if [ "$lost" = 1 ]; then
    printf 'FULL %s\n' "$word"
    continue
  fi
  printf 'END %s %s %s %s %s\n' "$word" "$code" "$timed" "$(wc -c <"$d/o.kept")" "$(wc -c <"$d/e.kept")"
  cat "$d/o.kept" "$d/e.kept"
done
