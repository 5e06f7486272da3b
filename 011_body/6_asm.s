
/tmp/tmpy94je471.o:     file format elf64-x86-64


Disassembly of section .ltext:

0000000000000000 <k0_body>:
   0:	push   %rbp
   1:	push   %r15
   3:	push   %r14
   5:	push   %r13
   7:	push   %r12
   9:	push   %rbx
   a:	sub    $0x48,%rsp
   e:	lea    0x100(%rdx),%rax
  15:	mov    %rdx,%rbp
  18:	movabs $0x0,%rdx
  22:	movabs $0x0,%r13
  2c:	mov    %r8,0x18(%rsp)
  31:	mov    %rsi,0x10(%rsp)
  36:	mov    %rdi,0x28(%rsp)
  3b:	vmovss (%rdx),%xmm0
  3f:	mov    %rax,0x30(%rsp)
  44:	mov    0x30(%rsp),%r14
  49:	vmovss %xmm0,0x4(%rsp)
  4f:	jmp    83 <k0_body+0x83>
  51:	data16 data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
  60:	mov    0x8(%rsp),%rcx
  65:	mov    0x10(%rsp),%rax
  6a:	movl   $0x8,0x0(%rbp)
  71:	vmovups (%rdi,%rcx,4),%ymm0
  76:	vmovups %ymm0,(%rax,%rcx,4)
  7b:	mov    0x20(%rsp),%rcx
  80:	inc    %rcx
  83:	cmp    0x18(%rsp),%rcx
  88:	jge    172 <k0_body+0x172>
  8e:	mov    %rcx,%rax
  91:	shr    $0x2,%rax
  95:	mov    %ecx,%edx
  97:	and    $0x3,%edx
  9a:	mov    %rcx,0x20(%rsp)
  9f:	xor    %r12d,%r12d
  a2:	mov    %rax,0x38(%rsp)
  a7:	shl    $0x5,%rax
  ab:	mov    %edx,%ecx
  ad:	mov    %rdx,0x40(%rsp)
  b2:	lea    (%rax,%rcx,8),%rax
  b6:	mov    %rax,0x8(%rsp)
  bb:	jmp    c3 <k0_body+0xc3>
  bd:	nopl   (%rax)
  c0:	inc    %r12
  c3:	cmp    $0x7,%r12
  c7:	jg     60 <k0_body+0x60>
  c9:	cmp    $0x7,%r12d
  cd:	mov    $0x7,%eax
  d2:	vmovss 0x4(%rsp),%xmm1
  d8:	cmovl  %r12d,%eax
  dc:	cltq
  de:	add    0x8(%rsp),%rax
  e3:	vmovss (%rdi,%rax,4),%xmm0
  e8:	vucomiss %xmm1,%xmm0
  ec:	vcmpeqss %xmm1,%xmm0,%k0
  f3:	kmovw  %k0,%ecx
  f7:	mov    %ecx,0x0(%rbp)
  fa:	jne    c0 <k0_body+0xc0>
  fc:	jp     c0 <k0_body+0xc0>
  fe:	vmovss (%rdi,%rax,4),%xmm0
 103:	mov    0x38(%rsp),%rax
 108:	lea    0x80(%rbp),%rdx
 10f:	lea    0x40(%rbp),%rbx
 113:	lea    0xc0(%rbp),%r15
 11a:	mov    $0x8,%edi
 11f:	xor    %esi,%esi
 121:	vmovss %xmm0,(%rdx)
 125:	mov    %r12d,(%r14)
 128:	mov    %eax,(%rbx)
 12a:	mov    0x40(%rsp),%rax
 12f:	mov    %eax,(%r15)
 132:	vzeroupper
 135:	call   *%r13
 138:	mov    $0x8,%edi
 13d:	mov    $0x1,%esi
 142:	mov    %r14,%rdx
 145:	call   *%r13
 148:	mov    $0x8,%edi
 14d:	mov    $0x2,%esi
 152:	mov    %rbx,%rdx
 155:	call   *%r13
 158:	mov    $0x8,%edi
 15d:	mov    $0x3,%esi
 162:	mov    %r15,%rdx
 165:	call   *%r13
 168:	mov    0x28(%rsp),%rdi
 16d:	jmp    c0 <k0_body+0xc0>
 172:	add    $0x48,%rsp
 176:	pop    %rbx
 177:	pop    %r12
 179:	pop    %r13
 17b:	pop    %r14
 17d:	pop    %r15
 17f:	pop    %rbp
 180:	vzeroupper
 183:	ret
 184:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000190 <pbk_task0>:
 190:	push   %rax
 191:	mov    %rdx,%r8
 194:	lea    (%rcx,%rcx,4),%rdx
 198:	mov    %rsi,%rax
 19b:	mov    (%rdi),%r9
 19e:	mov    0x8(%rdi),%rsi
 1a2:	movabs $0x0,%r10
 1ac:	mov    %rax,%rcx
 1af:	shl    $0x6,%rdx
 1b3:	add    0x10(%rdi),%rdx
 1b7:	mov    %r9,%rdi
 1ba:	call   *%r10
 1bd:	pop    %rax
 1be:	ret
 1bf:	nop

00000000000001c0 <pbk_main>:
 1c0:	sub    $0x18,%rsp
 1c4:	vmovups (%rsi),%xmm0
 1c8:	movabs $0x0,%rax
 1d2:	mov    %rsp,%rdi
 1d5:	xor    %esi,%esi
 1d7:	xor    %ecx,%ecx
 1d9:	vmovups %xmm0,(%rsp)
 1de:	mov    %rdx,0x10(%rsp)
 1e3:	mov    $0x8,%edx
 1e8:	call   *%rax
 1ea:	add    $0x18,%rsp
 1ee:	ret
 1ef:	nop

00000000000001f0 <pbk_run>:
 1f0:	push   %r15
 1f2:	push   %r14
 1f4:	push   %r13
 1f6:	push   %r12
 1f8:	push   %rbx
 1f9:	sub    $0x10,%rsp
 1fd:	mov    %rsi,%rbx
 200:	movabs $0x0,%r15
 20a:	movabs $0x0,%rax
 214:	lea    0x8(%rsp),%rcx
 219:	mov    $0x1000,%esi
 21e:	mov    $0x1000,%edx
 223:	mov    %rdi,%r14
 226:	mov    %r15,%rdi
 229:	call   *%rax
 22b:	mov    0x8(%rsp),%r13
 230:	mov    %rax,%r12
 233:	movabs $0x0,%rax
 23d:	mov    %r14,%rdi
 240:	mov    %rbx,%rsi
 243:	mov    %r13,%rdx
 246:	call   *%rax
 248:	movabs $0x0,%rax
 252:	mov    %r15,%rdi
 255:	mov    %r13,%rsi
 258:	mov    %r12,%rdx
 25b:	call   *%rax
 25d:	add    $0x10,%rsp
 261:	pop    %rbx
 262:	pop    %r12
 264:	pop    %r13
 266:	pop    %r14
 268:	pop    %r15
 26a:	ret
 26b:	nopl   0x0(%rax,%rax,1)

0000000000000270 <pbk_call>:
 270:	push   %rax
 271:	movabs $0x0,%rax
 27b:	mov    %rdi,%rsi
 27e:	xor    %edi,%edi
 280:	call   *%rax
 282:	pop    %rax
 283:	ret
 284:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000290 <pbk_handler>:
 290:	mov    0x8(%rdi),%rax
 294:	test   %rax,%rax
 297:	je     2c8 <pbk_handler+0x38>
 299:	cmpl   $0x1,0x8(%rax)
 29d:	sete   %cl
 2a0:	test   %cl,%cl
 2a2:	je     2ce <pbk_handler+0x3e>
 2a4:	mov    0x18(%rax),%rax
 2a8:	movabs $0x300000000,%rcx
 2b2:	mov    %rcx,0x18(%rax)
 2b6:	movl   $0x0,0x20(%rax)
 2bd:	movq   $0x0,0x28(%rax)
 2c5:	xor    %eax,%eax
 2c7:	ret
 2c8:	xor    %ecx,%ecx
 2ca:	test   %cl,%cl
 2cc:	jne    2a4 <pbk_handler+0x14>
 2ce:	sub    $0x18,%rsp
 2d2:	mov    0x48(%rdi),%rax
 2d6:	mov    0x70(%rdi),%rcx
 2da:	lea    0x8(%rsp),%rsi
 2df:	mov    (%rax),%rax
 2e2:	mov    0x18(%rax),%rax
 2e6:	mov    %rax,0x8(%rsp)
 2eb:	mov    (%rcx),%rax
 2ee:	mov    0x18(%rax),%rax
 2f2:	mov    %rax,0x10(%rsp)
 2f7:	movabs $0x0,%rax
 301:	call   *%rax
 303:	add    $0x18,%rsp
 307:	xor    %eax,%eax
 309:	ret
 30a:	nopw   0x0(%rax,%rax,1)

0000000000000310 <_mlir_k0_body>:
 310:	push   %rax
 311:	mov    (%rdi),%rax
 314:	mov    0x10(%rdi),%rdx
 318:	mov    0x8(%rdi),%rcx
 31c:	mov    0x18(%rdi),%r8
 320:	mov    0x20(%rdi),%rdi
 324:	movabs $0x0,%r9
 32e:	mov    (%rcx),%rsi
 331:	mov    (%r8),%rcx
 334:	mov    (%rax),%rax
 337:	mov    (%rdi),%r8
 33a:	mov    (%rdx),%rdx
 33d:	mov    %rax,%rdi
 340:	call   *%r9
 343:	pop    %rax
 344:	ret
 345:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000350 <_mlir_pbk_task0>:
 350:	push   %rax
 351:	mov    (%rdi),%rax
 354:	mov    0x10(%rdi),%rdx
 358:	mov    0x8(%rdi),%rcx
 35c:	mov    0x18(%rdi),%rdi
 360:	movabs $0x0,%r8
 36a:	mov    (%rcx),%rsi
 36d:	mov    (%rax),%rax
 370:	mov    (%rdi),%rcx
 373:	mov    (%rdx),%rdx
 376:	mov    %rax,%rdi
 379:	call   *%r8
 37c:	pop    %rax
 37d:	ret
 37e:	xchg   %ax,%ax

0000000000000380 <_mlir_pbk_main>:
 380:	push   %rax
 381:	mov    (%rdi),%rax
 384:	mov    0x10(%rdi),%rdx
 388:	mov    0x8(%rdi),%rcx
 38c:	mov    (%rax),%rax
 38f:	mov    (%rcx),%rsi
 392:	mov    (%rdx),%rdx
 395:	movabs $0x0,%rcx
 39f:	mov    %rax,%rdi
 3a2:	call   *%rcx
 3a4:	pop    %rax
 3a5:	ret
 3a6:	cs nopw 0x0(%rax,%rax,1)

00000000000003b0 <_mlir_pbk_run>:
 3b0:	push   %rax
 3b1:	mov    0x8(%rdi),%rcx
 3b5:	mov    (%rdi),%rax
 3b8:	mov    (%rax),%rdi
 3bb:	mov    (%rcx),%rsi
 3be:	movabs $0x0,%rax
 3c8:	call   *%rax
 3ca:	pop    %rax
 3cb:	ret
 3cc:	nopl   0x0(%rax)

00000000000003d0 <_mlir_pbk_call>:
 3d0:	push   %rax
 3d1:	mov    (%rdi),%rax
 3d4:	mov    (%rax),%rdi
 3d7:	movabs $0x0,%rax
 3e1:	call   *%rax
 3e3:	pop    %rax
 3e4:	ret
 3e5:	data16 cs nopw 0x0(%rax,%rax,1)

00000000000003f0 <_mlir_pbk_handler>:
 3f0:	push   %rbx
 3f1:	mov    (%rdi),%rax
 3f4:	mov    %rdi,%rbx
 3f7:	mov    (%rax),%rdi
 3fa:	movabs $0x0,%rax
 404:	call   *%rax
 406:	mov    0x8(%rbx),%rcx
 40a:	mov    %rax,(%rcx)
 40d:	pop    %rbx
 40e:	ret

