# Makes a C++ file with the text of a file in it: cmake -DINPUT=... -DOUTPUT=... -DNAME=... -P embed_text.cmake
file(READ "${INPUT}" text)
string(LENGTH "${text}" length)
set(parts "")
set(at 0)
while(at LESS length)   # in pieces: compilers limit the length of one literal
  string(SUBSTRING "${text}" ${at} 4000 part)
  string(APPEND parts "    R\"sf_text(${part})sf_text\"\n")
  math(EXPR at "${at} + 4000")
endwhile()
file(WRITE "${OUTPUT}" "namespace sf {\nextern const char* const ${NAME};\nconst char* const ${NAME} =\n${parts};\n}  // namespace sf\n")
